//! Generates the messages of the contract, in modules named as the packages of the protos.

use std::path::{Path, PathBuf};

const SERVICES: [&str; 5] = [
    "dataflow/v1/raas_service",
    "dataflow/v1/session_service",
    "dataflow/v1/trainer_service",
    "weights/v1/transfer_service",
    "weights/v1/version_service",
];

fn main() -> std::io::Result<()> {
    let told = std::env::var("ASTRAFLOW_PROTOS").unwrap_or_else(|_| "../../../protos".into());
    let root = Path::new(&told);
    let files: Vec<PathBuf> =
        SERVICES.iter().map(|name| root.join(format!("astraflow/{name}.proto"))).collect();
    println!("cargo:rerun-if-env-changed=ASTRAFLOW_PROTOS");
    println!("cargo:rerun-if-changed={told}");
    prost_build::Config::new().include_file("contract.rs").compile_protos(&files, &[root])
}
