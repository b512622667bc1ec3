"""What a run learns from: texts, rows and data sets become samples with stable ids."""
