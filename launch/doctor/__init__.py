"""`thinpipe doctor`: hosts examine themselves and each other before a run.

`host` looks at one host, `meeting` brings them together, `links` measures every pair, `checks`
turns the facts into findings, `report` shows them.
"""
