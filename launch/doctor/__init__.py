"""`thinpipe doctor`: checks the hosts of a run and the links between them before it starts.

`host` inspects one host, `group` connects the hosts, `links` measures every link, `checks` compares
hosts and links, `cli` prints the results.
"""
