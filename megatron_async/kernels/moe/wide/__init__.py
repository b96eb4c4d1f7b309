"""The grouped GEMMs of experts that have many tokens each, with weights that TMA brings."""
