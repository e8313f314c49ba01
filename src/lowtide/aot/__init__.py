"""The capture: a step as graphs that may be rearranged, and schedules of them as code."""
