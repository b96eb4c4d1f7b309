"""SGLang's routes, for trainers whose rollouts speak to SGLang: slime, AReaL."""
