"""Training of Vision DiffMask gates (`steadygaze diffmask train`): settings, one step, and the resumable
run."""
