"""Whether captured graphs still read and write what the engine has now."""
