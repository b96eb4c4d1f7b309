"""Several processes that run one model, its ranks: see ``docs/scaling.md``."""
