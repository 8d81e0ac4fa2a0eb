"""Log of SGLang (scheduler_metrics_mixin.py: lines with "Decode batch") and its /server_info."""

from collections.abc import Mapping

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import (
    Output,
    OutputReader,
    count,
    find_last,
    find_number,
    mean,
    number,
    objects,
    text_of,
)

MARK = "Decode batch"


class SGLangLog(OutputReader):
    """Log of an SGLang server. Its accept rate is not read, because old versions count the bonus token in it."""

    title = "SGLang log"

    def read(self, output: Output) -> Observation | None:
        if MARK not in output.text or "gen throughput" not in output.text:
            return None
        lines = [*output.lines(MARK)]
        speeds = [find_number("gen throughput (token/s):", line) or 0.0 for line in lines]
        given = "".join(output.lines("server_args="))
        steps = find_last(r"speculative_num_steps=([0-9]{1,3})\b", given)
        tokens = find_last(r"speculative_num_draft_tokens=([0-9]{1,4})\b", given)
        offload = find_last(r"cpu_offload_gb=([0-9]{1,5})\b", given)
        after_prefill = speeds[1:] if len(speeds) > 2 else speeds
        return Observation(
            engine="sglang",
            source=self.title,
            method=find_last(r"speculative_algorithm='([\w-]{1,60})'", given),
            drafter=find_last(r"speculative_draft_model_path='([^']{1,200})'", given),
            target=find_last(r"model_path='([^']{1,200})'", given.partition("speculative")[0]),
            k=int(steps) or None if steps else None,
            drafted_per_step=float(tokens) - 1.0 if tokens and int(tokens) > 1 else None,
            accepted_length=mean(find_number("accept len:", line) or 0.0 for line in lines),
            tokens_per_s=mean(after_prefill),
            batch_size=mean(find_number("#running-req:", line) or 0.0 for line in lines),
            offloaded=int(offload) > 0 if offload else None,
        )


class SGLangServerInfo(OutputReader):
    """Answer of SGLang's /server_info or /get_server_info."""

    title = "SGLang server info"

    def read(self, output: Output) -> Observation | None:
        data = output.json
        if not isinstance(data, Mapping) or "internal_states" not in data:
            return None
        states = objects(data["internal_states"])
        tokens, offload = count(data.get("speculative_num_draft_tokens")), number(data.get("cpu_offload_gb"))
        return Observation(
            engine="sglang",
            source=self.title,
            method=text_of(data.get("speculative_algorithm")),
            drafter=text_of(data.get("speculative_draft_model_path")),
            target=text_of(data.get("model_path")),
            k=count(data.get("speculative_num_steps")) or None,
            drafted_per_step=tokens - 1.0 if tokens and tokens > 1 else None,
            accepted_length=mean(number(state.get("avg_spec_accept_length")) or 0.0 for state in states),
            tokens_per_s=mean(number(state.get("last_gen_throughput")) or 0.0 for state in states),
            offloaded=None if offload is None else offload > 0.0,
        )
