"""Below one op: stretches of a step that run slice by slice, along a dimension that their ops treat independently."""
