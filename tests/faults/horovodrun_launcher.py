"""horovodrun, as its command starts it, which looks for hosts more often, as Horovod's own tests have it do.

It does not import the frameworks to find out whether Horovod was built with Gloo.
"""

from __future__ import annotations

from horovod.runner import launch
from horovod.runner.elastic import driver

if __name__ == "__main__":
    driver.DISCOVER_HOSTS_FREQUENCY_SECS = 0.1
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
