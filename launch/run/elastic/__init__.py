"""A run goes on without replicas that it loses: `generations` agrees, `training` adapts."""
