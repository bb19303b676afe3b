//! What a trainer and a RaaS in Rust share: messages generated from the protos, gRPC, sessions, weights.

pub mod grpc;
pub mod member;
pub mod options;
pub mod replica;
pub mod weights;

/// The contract, in modules named as its packages.
pub mod contract {
    include!(concat!(env!("OUT_DIR"), "/contract.rs"));
}
pub use contract::astraflow::{common::v1 as common, dataflow::v1 as dataflow};
pub use contract::astraflow::{rollout::v1 as rollout, weights::v1 as weights_v1};
