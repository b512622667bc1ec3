"""Conversations: messages, the template that writes them out, and which of it is learnt."""
