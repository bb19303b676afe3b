#!/usr/bin/env bash
# Install what builds the peers in Go and Rust, and compiles what is generated for C++ and Java, for the
# tests marked `peers`: Debian packages, as root, about two minutes.
#
#   scripts/install_peer_tools.sh
#
# Node, and a JDK, come from where you have them; tests skip what they find no tools for.
set -euo pipefail

packages=(
  # Go: the compiler, the generators, and the packages that go.mod would get from a proxy.
  golang-go protoc-gen-go protoc-gen-go-grpc
  golang-google-grpc-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev
  golang-github-klauspost-compress-dev golang-lukechampine-blake3-dev
  # Rust: the crates of tests/peers/rust, where Cargo reads them as a directory.
  librust-base64-dev librust-blake3-dev librust-bytes-dev librust-futures-util-dev librust-h2-dev
  librust-http-dev librust-prost-dev librust-prost-build-dev librust-prost-types-dev librust-tokio-dev
  librust-zstd-dev pkg-config
  # Generators, and what C++ and Java compile against.
  protobuf-compiler protobuf-compiler-grpc protobuf-compiler-grpc-java-plugin libprotobuf-dev
  g++ libgrpc++-dev libgrpc-java libprotobuf-java
)
# A newer one is as good.
command -v cargo >/dev/null || packages+=(cargo rustc)
apt-get install --yes --no-install-recommends "${packages[@]}"
