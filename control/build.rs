//! Generates the code of the gRPC services and messages; protox compiles the .proto files, so no protoc is needed for ours.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["vipgate/admin/v1/admin.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .btree_map(".")
        .message_attribute(".", "#[derive(serde::Serialize)]")
        .compile_fds(files)?;
    let files = protox::compile(["vipgate/policy/v1/policy.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
