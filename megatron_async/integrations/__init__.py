"""This package behind other libraries' interfaces. Nothing else imports it."""
