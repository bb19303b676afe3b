"""An engine whose checkpoints are whole only when a test says so, but for the first one."""

import os
import time
from pathlib import Path

from astraflow.trainers.torch_engine import TorchEngine


class SlowDisk(TorchEngine):
    def wait_for_save(self):
        super().wait_for_save()
        while self.step_count and not Path(os.environ["SLOW_DISK_UNTIL"]).exists():
            time.sleep(0.1)
