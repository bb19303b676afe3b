"""Checks of what a member says of itself: contract, model, code."""

from collections.abc import Sequence

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import CONTRACT_VERSION, Capability, Contract, ModelIdentity
from astraflow.core.tasks import RegisteredCode, WorkflowSpec


def check_contract(contract: Contract) -> None:
    """Refuse a peer that speaks another contract.

    Raises:
        AstraflowError: CONTRACT_UNSUPPORTED.
    """
    if contract.contract_version < 1:
        raise AstraflowError(
            Reason.CONTRACT_UNSUPPORTED,
            f"contract {contract.contract_version} is not spoken here, only 1 to "
            f"{CONTRACT_VERSION}; update {contract.software or 'the member'}",
        )


def check_routes(contract: Contract, policy_id: PolicyId) -> None:
    """Refuse a peer that neither tells nor replays the experts of a policy that needs it.

    Raises:
        AstraflowError: CONTRACT_UNSUPPORTED.
    """
    if Capability.ROUTED_EXPERTS not in contract.capabilities:
        raise AstraflowError(
            Reason.CONTRACT_UNSUPPORTED,
            f"{policy_id} is trained with router_replay: required, and this member has no "
            "capability routed_experts; take an engine that tells, and a model with routers, or "
            "set router_replay: told",
        )


def merge_identity(known: ModelIdentity, said: ModelIdentity) -> ModelIdentity:
    """Return what is known of a model by both.

    Raises:
        AstraflowError: MODEL_MISMATCH when a digest that both give differs.
    """
    for part in ("config_digest", "tokenizer_digest", "chat_template_digest"):
        one, other = getattr(known, part), getattr(said, part)
        if one and other and one != other:
            raise AstraflowError(
                Reason.MODEL_MISMATCH,
                f"the {part.removesuffix('_digest')} of model '{said.name}' differs from that of "
                "the members that joined before; give all the same model directory",
            )
    return ModelIdentity(
        name=known.name or said.name,
        config_digest=known.config_digest or said.config_digest,
        tokenizer_digest=known.tokenizer_digest or said.tokenizer_digest,
        chat_template_digest=known.chat_template_digest or said.chat_template_digest,
    )


def check_codes(workflow: WorkflowSpec, codes: Sequence[RegisteredCode]) -> None:
    """Refuse a RaaS that lacks the code of a workflow, or has another release of it.

    Raises:
        AstraflowError: CODE_UNKNOWN, CODE_MISMATCH.
    """
    digests = {code.name: code.code_digest for code in codes}
    for wanted in (workflow.code, workflow.scorer):
        if wanted is None:
            continue
        if wanted.name not in digests:
            raise AstraflowError(
                Reason.CODE_UNKNOWN,
                f"workflow {workflow.workflow_id} needs '{wanted.name}', which the RaaS has not; "
                "install or register it there",
            )
        digest = digests[wanted.name]
        if digest and wanted.code_digest and digest != wanted.code_digest:
            raise AstraflowError(
                Reason.CODE_MISMATCH,
                f"the RaaS has another release of '{wanted.name}' than the hub; "
                "install the same one",
            )
