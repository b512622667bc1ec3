"""Configuration, command line, training loop, data, checkpoints and reports: joins the engines."""
