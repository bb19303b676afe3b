"""Runs the published Dataflow: its service, pool, acquisition and buffers.

    python dataflow.py PORT

Its prompts are rows of this file; nothing of it is replaced.
"""

import sys

from astraflow.dataflow.service import AstraFlowService, _create_dataloader, create_app
from astraflow.dataflow.service_config import AgentConfig, ServiceConfig

ROWS = [{"query_id": f"q{i}", "prompt": f"row {i}", "answer": i} for i in range(64)]


def main():
    port = int(sys.argv[1])
    agent = AgentConfig(
        workflow_spec={"workflow_cls": "gateway_digits", "gconfig_overrides": {"n_samples": 2}},
        expected_model_ids=["solver"],
    )
    service = AstraFlowService(ServiceConfig(host="127.0.0.1", port=port, agent=agent))
    service.register_agent("default", agent, _create_dataloader(ROWS))
    create_app(service).run(host="127.0.0.1", port=port, threaded=True)


if __name__ == "__main__":
    main()
