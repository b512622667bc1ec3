"""AQ-SGD in a learned transform (`kind = "transform"`).

`boundary.py` is one end of a direction (`evaluation.py`: in evaluation); what both ends know is in
`learned.py` and, of samples, in `rows.py`. The sender searches a basis (`basis_search.py`), sends
it (`proposals.py`), and chooses steps (`steps.py`). Whole numbers go through `basis.py` and
`coefficients.py`, with the models of `logistic.py`.
"""
