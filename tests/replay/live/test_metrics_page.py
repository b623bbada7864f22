"""Pages of metrics, as engines write them."""

from __future__ import annotations

from kvyard.replay.live.facts import cache_labels, is_asleep
from kvyard.replay.live.metrics_page import MetricsPage

PAGE = MetricsPage(
    """# HELP vllm:num_requests_running how many
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\", c"} 2.0
vllm:num_requests_running{engine="1",model_name="x"} 3
vllm:num_requests_waiting{engine="2"} NaN
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="32",engine="1"} 1.0
sglang:num_running_reqs 4.5
plain nonsense
"""
)


def test_samples_add_up_and_what_is_no_number_is_left_out() -> None:
    assert PAGE.total("vllm:num_requests_running") == 5.0
    assert PAGE.total("vllm:num_requests_running", "sglang:num_running_reqs") == 9.5
    assert "vllm:num_requests_waiting" in PAGE and PAGE.total("vllm:num_requests_waiting") == 0.0
    assert "vllm:num_requests" not in PAGE and PAGE.total("vllm:num_requests") == 0.0


def test_labels_of_a_metric_and_their_values() -> None:
    assert PAGE.labels("vllm:num_requests_running")[0] == ({"engine": "0", "model_name": r"a \"b\", c"}, 2.0)
    assert PAGE.label_values("engine", "vllm:") == {"0", "1"}
    assert PAGE.label_values("engine", "sglang:") == set()
    assert cache_labels(PAGE) == {"block_size": "16", "engine": "0", "num_gpu_blocks": "100"}
    assert cache_labels(MetricsPage("")) == {}


def test_an_engine_sleeps_if_no_rank_is_awake() -> None:
    state = 'vllm:engine_sleep_state{engine="%d",sleep_state="%s"} %s\n'
    asleep = state % (0, "awake", "0.0") + state % (0, "weights_offloaded", "1.0")
    assert is_asleep(MetricsPage(asleep))
    assert not is_asleep(MetricsPage(asleep + state % (1, "awake", "1.0")))
    assert not is_asleep(MetricsPage(""))
