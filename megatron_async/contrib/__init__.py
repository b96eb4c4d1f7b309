"""What stands beside the engine for users of other libraries; nothing imports it."""
