"""Several engines behind one server: which of them gets a request, and their lives under Ray Serve.

Nothing but ``ray_serve`` and ``ray_cluster`` imports Ray.
"""
