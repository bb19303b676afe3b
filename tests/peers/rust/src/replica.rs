//! What a RaaS holds of a policy: one verified version, and the way to the next.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::grpc::{binary, Channel, Status, DATA_LOSS};
use crate::weights::{apply, chunk_digest, layout_digest, root_digest, state_digest, Refused};
use crate::weights_v1::VersionInfo;
use crate::weights_v1::{pull_response::Item, Chunk, CodecProfile, GetLayoutRequest, GetLayoutResponse};
use crate::weights_v1::{Layout, PatchInfo, PullRequest, PullResponse, TransferPlan, TransferSpec};

const TRANSFER_SERVICE: &str = "/astraflow.weights.v1.TransferService/";
const DEADLINE: Duration = Duration::from_secs(30);

/// A verified version. The state has all tensors, where the layout says.
pub struct Version {
    pub number: i64,
    pub layout: Layout,
    pub state: Vec<u8>,
}

/// The newest version that verified; others wait for it.
pub struct Replica(watch::Sender<Option<Arc<Version>>>);

impl Default for Replica {
    fn default() -> Self {
        Replica(watch::channel(None).0)
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        Status::new(DATA_LOSS, "DIGEST_MISMATCH", refused.0)
    }
}

impl Replica {
    pub fn version(&self) -> Option<Arc<Version>> {
        self.0.borrow().clone()
    }

    /// Returns a version that is no older than asked for.
    pub async fn wait_for(&self, min: i64) -> Arc<Version> {
        let mut changes = self.0.subscribe();
        loop {
            if let Some(version) = changes.borrow_and_update().clone().filter(|held| held.number >= min) {
                return version;
            }
            changes.changed().await.expect("the replica is still there");
        }
    }

    /// Takes a version from a source. Anew: not as patches of what is held. One that does not verify
    /// leaves the one before.
    pub async fn pull(
        &self,
        info: &VersionInfo,
        source: &Source<'_>,
        announced: &[PatchInfo],
        anew: bool,
    ) -> Result<(), Status> {
        let held = self.version().filter(|_| !anew);
        let (layout, mut state) = match &held {
            Some(held) => (held.layout.clone(), held.state.clone()),
            None => {
                let layout = source.layout(info).await?;
                let state = vec![0; layout.nbytes as usize];
                (layout, state)
            }
        };
        let spec = TransferSpec {
            policy_id: info.policy_id.clone(),
            version: info.version,
            base_version: held.map(|held| held.number),
            layout_digest: info.layout_digest.clone(),
            profiles: vec![CodecProfile::Fast.into()],
            ..Default::default()
        };
        // In the order of the patches; within one they do not touch each other.
        let mut chunks = source.chunks(spec, announced).await?;
        chunks.sort_by_key(|chunk| chunk.patch_index);
        for chunk in &chunks {
            apply(chunk, &mut state)?;
        }
        if state_digest(&layout, &state)? != info.content_digest {
            return Err(Refused("another state than the registered one").into());
        }
        self.0.send_replace(Some(Arc::new(Version { number: info.version, layout, state })));
        Ok(())
    }
}

/// Where a version can be had.
pub struct Source<'a> {
    pub endpoint: &'a str,
    pub token: Vec<u8>,
}

impl Source<'_> {
    async fn layout(&self, info: &VersionInfo) -> Result<Layout, Status> {
        let request = GetLayoutRequest { layout_digest: info.layout_digest.clone() };
        let path = format!("{TRANSFER_SERVICE}GetLayout");
        let channel = Channel::new(self.endpoint);
        let answer: GetLayoutResponse = channel.unary(&path, self.metadata(), &request, DEADLINE).await?;
        let layout = answer.layout.unwrap_or_default();
        if layout_digest(&layout) != info.layout_digest {
            return Err(Refused("another layout than the registered one").into());
        }
        Ok(layout)
    }

    /// Returns the chunks of a plan, all of them verified.
    async fn chunks(&self, spec: TransferSpec, announced: &[PatchInfo]) -> Result<Vec<Chunk>, Status> {
        let path = format!("{TRANSFER_SERVICE}Pull");
        let channel = Channel::new(self.endpoint);
        let opened = channel.open::<PullRequest, PullResponse>(&path, self.metadata(), Some(DEADLINE));
        let (mut sink, mut answers) = opened.await?;
        sink.send(&PullRequest { spec: Some(spec) }).await?;
        sink.finish();
        let (mut plan, mut chunks) = (TransferPlan::default(), vec![]);
        while let Some(answer) = answers.next().await? {
            match answer.item {
                Some(Item::Plan(told)) => plan = verified_plan(told, announced)?,
                Some(Item::Chunk(chunk)) => chunks.push(verified_chunk(chunk, &plan)?),
                _ => {}
            }
        }
        Ok(chunks)
    }

    fn metadata(&self) -> Vec<(&'static str, String)> {
        vec![("astraflow-transfer-bin", binary(&self.token))]
    }
}

/// Refuses a plan that the run did not announce.
fn verified_plan(plan: TransferPlan, announced: &[PatchInfo]) -> Result<TransferPlan, Refused> {
    for index in &plan.patches {
        let root = index.patch.as_ref().map(|patch| patch.root_digest.as_slice()).unwrap_or_default();
        if root_digest(index) != root || !announced.iter().any(|patch| patch.root_digest == root) {
            return Err(Refused("a plan does not add up to a registered root"));
        }
    }
    Ok(plan)
}

fn verified_chunk(chunk: Chunk, plan: &TransferPlan) -> Result<Chunk, Refused> {
    let index = chunk.header.as_ref().map_or(-1, |header| header.index);
    let patch = plan.patches.get(chunk.patch_index as usize);
    let digest = patch.and_then(|patch| patch.chunk_digests.get(index as usize));
    if digest != Some(&chunk_digest(&chunk)) {
        return Err(Refused("a chunk has another digest"));
    }
    Ok(chunk)
}
