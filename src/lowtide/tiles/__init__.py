"""Below one op: stretches of a step in slices, along a dimension that their ops treat independently."""
