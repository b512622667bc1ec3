"""A run loses replicas and is joined by others: `generations`, `visits`; `training` adapts."""
