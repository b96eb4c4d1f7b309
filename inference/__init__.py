"""What people start: the command line. Installed as ``megatron_async.inference``.

Modules here import each other relatively, since the folder's place in a checkout and its name
when installed differ.
"""
