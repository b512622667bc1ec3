"""Models of the user's own: any `nn.Sequential`, built by a function, cut between its layers."""
