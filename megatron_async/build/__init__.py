"""From a configuration to an engine: ``spec``, ``model``, ``ranks``, ``runner``, ``engine``."""
