"""Price a layout without the hardware.

Any function with abstract arguments is compiled for simulated or ahead-of-time devices; its
collectives, memory and roofline are read from the compiled program. The model is not imported.
"""
