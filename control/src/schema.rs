//! JSON schemas of everything that people write: custom resources and configuration files.

use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde_json::Value;
use vipgate_policy::manifest::{Kind, schema};
use vipgate_policy::schema::root;

use crate::config::{Config, NodeConfig, PolicydConfig};

/// Documents with a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Kind `EgressPolicy`.
    EgressPolicy,
    /// Kind `ClusterEgressPolicy`.
    ClusterEgressPolicy,
    /// Kind `VipGateway`.
    Gateway,
    /// Kind `AddressPool`.
    AddressPool,
    /// Kind `OverlayNode`.
    OverlayNode,
    /// Configuration of a gateway.
    GatewayYaml,
    /// Configuration of the policy server.
    PolicydYaml,
    /// Configuration of a node agent.
    NodeYaml,
}

impl Published {
    /// All documents.
    pub const ALL: [Self; 8] = [
        Self::EgressPolicy,
        Self::ClusterEgressPolicy,
        Self::Gateway,
        Self::AddressPool,
        Self::OverlayNode,
        Self::GatewayYaml,
        Self::PolicydYaml,
        Self::NodeYaml,
    ];

    /// The kind, or the default name of the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::EgressPolicy => Kind::EgressPolicy.as_str(),
            Self::ClusterEgressPolicy => Kind::ClusterEgressPolicy.as_str(),
            Self::Gateway => Kind::Gateway.as_str(),
            Self::AddressPool => Kind::AddressPool.as_str(),
            Self::OverlayNode => Kind::OverlayNode.as_str(),
            Self::GatewayYaml => "gateway.yaml",
            Self::PolicydYaml => "policyd.yaml",
            Self::NodeYaml => "node.yaml",
        }
    }
}

impl ValueEnum for Published {
    fn value_variants<'a>() -> &'a [Self] {
        &Self::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let former = Kind::named(self.name()).and_then(Kind::former_name);
        Some(PossibleValue::new(self.name()).aliases(former))
    }
}

/// The schema of a document.
pub fn document(of: Published) -> Value {
    let custom_resource = |kind| schema::schema_of(kind).unwrap_or_default();
    let configuration = |mut schema: Value, description: &str| {
        schema["title"] = of.name().into();
        schema["description"] = description.into();
        schema
    };
    match of {
        Published::EgressPolicy => custom_resource(Kind::EgressPolicy),
        Published::ClusterEgressPolicy => custom_resource(Kind::ClusterEgressPolicy),
        Published::Gateway => custom_resource(Kind::Gateway),
        Published::AddressPool => custom_resource(Kind::AddressPool),
        Published::OverlayNode => custom_resource(Kind::OverlayNode),
        Published::GatewayYaml => configuration(root::<Config>(), "Configuration of a gateway."),
        Published::PolicydYaml => configuration(root::<PolicydConfig>(), "Configuration of the policy server."),
        Published::NodeYaml => configuration(root::<NodeConfig>(), "Configuration of a node agent."),
    }
}

/// All schemas, by name.
pub fn all() -> Value {
    Value::Object(Published::ALL.map(|kind| (kind.name().to_owned(), document(kind))).into_iter().collect())
}

#[cfg(test)]
pub(crate) mod tests;
