//! JSON of every reply that `-o json` prints, with fields present and absent, of both families: scripts read it. What a
//! reply's type reads from `golden.json` it writes again, field by field.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::proto;
use crate::node::proto as node;

fn check<T: Serialize + DeserializeOwned>(golden: &mut serde_json::Map<String, Value>, name: &str) {
    let Some(Value::Array(examples)) = golden.remove(name) else { panic!("{name} has no examples") };
    for example in examples {
        let reply: T = serde_json::from_value(example.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(serde_json::to_value(reply).unwrap(), example, "{name}");
    }
}

#[test]
fn the_json_of_replies_is_stable() {
    let mut golden = serde_json::from_str(include_str!("golden.json")).unwrap();
    check::<proto::StatusReply>(&mut golden, "status");
    check::<proto::Session>(&mut golden, "session");
    check::<proto::FlushSessionsReply>(&mut golden, "flush");
    check::<proto::VipsReply>(&mut golden, "vips");
    check::<proto::EndpointsReply>(&mut golden, "endpoints");
    check::<proto::ServicesReply>(&mut golden, "services");
    check::<proto::PeersReply>(&mut golden, "peers");
    check::<proto::Move>(&mut golden, "move");
    check::<proto::PortsReply>(&mut golden, "ports");
    check::<proto::TraceReply>(&mut golden, "trace");
    check::<proto::ExplainReply>(&mut golden, "explain");
    check::<proto::DropExample>(&mut golden, "drop_example");
    check::<proto::DropsOf>(&mut golden, "drops_of");
    check::<node::StatusReply>(&mut golden, "node_status");
    check::<node::EndpointsReply>(&mut golden, "node_endpoints");
    check::<node::TraceReply>(&mut golden, "node_trace");
    assert!(golden.is_empty(), "{golden:?}");
}
