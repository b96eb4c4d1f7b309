"""Linear layers whose weights are e4m3 with scales, in memory as in the step."""
