"""Load on the engine here or on a server."""

from specdemo.bench.base import Report, Stop
from specdemo.bench.load_options import CONCURRENCY, LoadOptions
from specdemo.bench.result import Result
from specdemo.core.suggest import program
from specdemo.servers import engines


class Load(LoadOptions):
    """Measures throughput and latency of a preset's first lane under load, and derives a schedule for servers."""

    name = "load"
    order = 12
    title = "Load"
    question = (
        "At which load does the gain end? Throughput against latency at increasing concurrency, with a curve per draft "
        "length of the preset's first lane. In specdemo's engine, concurrent requests are the rows of a batch; "
        f"`{program()} bench load --engine {engines.DEFAULT}` measures the same on a server."
    )
    axis = CONCURRENCY

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.load_suite import load

        return load(self, report, cancelled)
