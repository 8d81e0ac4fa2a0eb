"""A serving engine for tests."""

from specdemo.servers.counters import ServerStats, draft_counters, draft_names
from specdemo.servers.engines.base import ServingEngine, address_flags

DRAFTS = "echo_drafting_"


class Echo(ServingEngine):
    name = "echo"
    title = "Echo"
    program = "echo-server"
    install = "pip install echo-server"
    methods = {"ngram": lambda model, k, options: ["--drafts", str(k), "--longest", str(options["max_n"])]}  # noqa: RUF012
    parallel = "--gpus"
    metrics = draft_names(DRAFTS)

    def start(self, config):
        return ["--serve", config.target, *address_flags(config)]

    def statistics(self, old, new):
        return draft_counters(old, new, DRAFTS, self.title)

    def acceptance(self, chunk):
        return ServerStats({"acceptance_rate": chunk["echo_rate"]}, [], "Echo's rate") if "echo_rate" in chunk else None
