"""What every kernel means, in plain torch: other backends are tested against it."""
