//! What a client shows a policy server of itself: in the first requests of each stream, and its token.

use std::sync::Arc;
use std::time::SystemTime;

use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use envoy_types::pb::envoy::config::core::v3::{Locality, Node};
use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use vipgate_policy::compiler::GatewayLocality;

use crate::config::PolicyServer;
use crate::text_file::regular_text;
use crate::xds::resource::{INCARNATION, NODE_ROLE, ROLE};

/// Identity of a client's process.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    name: Arc<str>,
    zone: Option<Arc<str>>,
    /// Its role, unless it is a gateway.
    role: Option<&'static str>,
    /// Identifies the process: a new number at each start.
    incarnation: u64,
}

impl Identity {
    /// Of a gateway.
    pub(super) fn gateway(gateway: &GatewayLocality) -> Self {
        let (name, zone) = (gateway.name.clone(), Some(gateway.zone.clone()));
        Self { name, zone, role: None, incarnation: new_incarnation() }
    }

    /// Of the agent of a node.
    pub(crate) fn agent(node: &str) -> Self {
        Self { name: node.into(), zone: None, role: Some(NODE_ROLE), incarnation: new_incarnation() }
    }

    /// As sent to the server.
    pub(super) fn node(&self) -> Node {
        let text = |text: String| Value { kind: Some(ValueKind::StringValue(text)) };
        let incarnation = (INCARNATION.to_owned(), text(format!("{:016x}", self.incarnation)));
        let role = self.role.map(|role| (ROLE.to_owned(), text(role.to_owned())));
        Node {
            id: self.name.to_string(),
            locality: self.zone.as_ref().map(|zone| Locality { zone: zone.to_string(), ..Locality::default() }),
            metadata: Some(Struct { fields: [incarnation].into_iter().chain(role).collect() }),
            user_agent_name: "vipgate".to_owned(),
            user_agent_version_type: Some(UserAgentVersionType::UserAgentVersion(env!("CARGO_PKG_VERSION").to_owned())),
            ..Node::default()
        }
    }
}

/// A request with the client's token, if it has one in place of a certificate: read again for each request, since
/// kubelet renews it.
pub(crate) fn authorized<T>(server: &PolicyServer, message: T) -> Result<Request<T>, String> {
    let mut request = Request::new(message);
    if let Some(path) = &server.token {
        let failed = |reason: String| format!("token {}: {reason}", path.display());
        let token = regular_text(path).map_err(|error| failed(format!("can't be read: {error}")))?;
        let value: MetadataValue<Ascii> = format!("Bearer {}", token.trim())
            .parse()
            .map_err(|_| failed("is not a token: it has other than visible characters".to_owned()))?;
        request.metadata_mut().insert("authorization", value);
    }
    Ok(request)
}

fn new_incarnation() -> u64 {
    // Fallback without a random source: the start time.
    let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    getrandom::u64().unwrap_or(started.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::fixtures::policy_server;

    #[test]
    fn an_agent_shows_its_role() {
        let fields = |identity: Identity| identity.node().metadata.unwrap().fields;
        let role = fields(Identity::agent("n1"))[ROLE].kind.clone();
        assert_eq!(role, Some(ValueKind::StringValue(NODE_ROLE.to_owned())));
        assert!(!fields(Identity::gateway(&GatewayLocality::named("g1"))).contains_key(ROLE));
    }

    #[test]
    fn a_client_shows_the_token_that_its_file_has_now() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let without = policy_server(&["https://localhost"]);
        assert!(authorized(&without, ()).unwrap().metadata().is_empty());
        let server = PolicyServer { token: Some(path.clone()), ..without };
        let error = authorized(&server, ()).unwrap_err();
        assert!(error.starts_with(&format!("token {}: can't be read: ", path.display())), "{error}");
        for token in ["first", "second"] {
            std::fs::write(&path, format!("{token}\n")).unwrap();
            let request = authorized(&server, ()).unwrap();
            let shown = request.metadata().get("authorization").unwrap().to_str().unwrap();
            assert_eq!(shown, format!("Bearer {token}"));
        }
        std::fs::write(&path, "a\nb").unwrap();
        assert!(authorized(&server, ()).unwrap_err().ends_with("it has other than visible characters"));
    }
}
