"""Training data: text, rows and data sets as samples with stable ids."""
