"""Experts of a decode step whose weights are widened in registers: e4m3 and MXFP4."""
