//! JSON of every reply that `-o json` prints, with fields present and absent, of both families: scripts read it. What a
//! reply's type reads from `golden.json` it writes again, field by field.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::drops::{DropExample, DropsOf};
use super::endpoints::EndpointsReply;
use super::explain::ExplainReply;
use super::membership::{Move, PeersReply};
use super::ports::PortsReply;
use super::server::FlushReply;
use super::services::ServicesReply;
use super::status::StatusReply;
use super::trace::TraceReply;
use super::vips::VipsReply;
use super::workers::Session;
use crate::node::admin as node;

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
    check::<StatusReply>(&mut golden, "status");
    check::<Session>(&mut golden, "session");
    check::<FlushReply>(&mut golden, "flush");
    check::<VipsReply>(&mut golden, "vips");
    check::<EndpointsReply>(&mut golden, "endpoints");
    check::<ServicesReply>(&mut golden, "services");
    check::<PeersReply>(&mut golden, "peers");
    check::<Move>(&mut golden, "move");
    check::<PortsReply>(&mut golden, "ports");
    check::<TraceReply>(&mut golden, "trace");
    check::<ExplainReply>(&mut golden, "explain");
    check::<DropExample>(&mut golden, "drop_example");
    check::<DropsOf>(&mut golden, "drops_of");
    check::<node::StatusReply>(&mut golden, "node_status");
    check::<node::EndpointsReply>(&mut golden, "node_endpoints");
    check::<node::TraceReply>(&mut golden, "node_trace");
    assert!(golden.is_empty(), "{golden:?}");
}
