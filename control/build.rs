//! Generates the gRPC services and protobuf messages. protox, in pure Rust, compiles the .proto files: no protoc is
//! needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(
        ["vipgate/policy/v1/policy.proto", "vipgate/policy/v1/status.proto", "vipgate/policy/v1/membership.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure()
        .message_attribute("vipgate.policy.v1.StatusReply", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.SourceStatus", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.PolicyState", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.GatewayState", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.EndpointState", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.MemberState", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.NodesState", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.SetAside", "#[derive(serde::Serialize)]")
        .field_attribute("vipgate.policy.v1.StatusReply.nodes", "#[serde(skip_serializing_if = \"Option::is_none\")]")
        .message_attribute("vipgate.policy.v1.AcceptEmptyReply", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.EmptyText", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.CloudReply", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.CloudPool", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.CloudAddress", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.CloudNic", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.CloudAction", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.CloudFailure", "#[derive(serde::Serialize)]")
        .message_attribute("vipgate.policy.v1.Diagnostic", "#[derive(serde::Serialize)]")
        .compile_fds(files)?;
    tonic_prost_build::configure().compile_fds(protox::compile(["vipgate/peer/v1/peer.proto"], ["proto"])?)?;
    // Envoy's aggregated discovery service (delta xDS) with a codec of its own: a response is encoded once for all
    // gateways.
    let discovery = tonic_build::manual::Service::builder()
        .name("AggregatedDiscoveryService")
        .package("envoy.service.discovery.v3")
        .method(
            tonic_build::manual::Method::builder()
                .name("delta_aggregated_resources")
                .route_name("DeltaAggregatedResources")
                .input_type("envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest")
                .output_type("crate::policyd::codec::Response")
                .codec_path("crate::policyd::codec::Codec")
                .client_streaming()
                .server_streaming()
                .build(),
        )
        .build();
    tonic_build::manual::Builder::new().build_client(false).compile(&[discovery]);
    Ok(())
}
