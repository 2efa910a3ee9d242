"""`rehearse --gpu`: checks over the package fake_cuda, whose README.md says what they cannot show.

devices.py    starts ranks on fake GPUs, as workers.py does on CPUs
observer.py   callback: notes the phase of each step, and writes down what the device reported
events.py     events by phase of training, and by whose line caused them
checks.py     the checks on these, and on curves of CPU processes"""

VARIABLE = "DIST_ON_FAKE_GPUS"  # set in processes whose ranks get fake GPUs; worker.py reads it
