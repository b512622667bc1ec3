"""Starting ranks, on one machine or several, and what they agree on before the first step."""
