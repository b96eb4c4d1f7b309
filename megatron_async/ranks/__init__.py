"""Several processes that run one model: its ranks. ``docs/scaling.md`` says who does what."""
