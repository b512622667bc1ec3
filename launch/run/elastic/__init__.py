"""A run loses replicas and is joined by others: `generations` and `visits` agree, `training` adapts."""
