"""What an operator asks of a live run."""

from astraflow.config.run_dir import HubEndpoint
from astraflow.launch.operations import revoke_token
from astraflow.rpc.access import HubTokens
from astraflow.testing import JOIN_TOKEN, OPERATOR_TOKEN, small_recipe, start_run


async def test_a_token_is_taken_back_at_a_hub_with_tls(tmp_path, pem):
    files = {"hub.tls.certificate": str(pem.certificate), "hub.tls.key": str(pem.key)}
    recipe = small_recipe(tmp_path, scorer="exact", changes=files)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        endpoint = HubEndpoint(
            address=run.address,
            pid=0,
            operator_token=OPERATOR_TOKEN,
            join_token=JOIN_TOKEN,
            tls=recipe.hub.tls.to_dial(),
        )
        run.run_dir.write_endpoint(endpoint)
        token = HubTokens(join=JOIN_TOKEN, operator=OPERATOR_TOKEN).of_role("node")
        assert await revoke_token(run.run_dir, token) == []
