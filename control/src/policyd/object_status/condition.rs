//! Conditions, and the status of an object that they are part of: what it is to be, and whether what it is differs.

use serde_json::{Map, Value, json};
use vipgate_policy::manifest::Kind;

/// Maximum length of a message, characters.
const MAX_MESSAGE: usize = 1000;

/// The status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Truth {
    True,
    False,
    Unknown,
}

impl Truth {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<bool> for Truth {
    fn from(value: bool) -> Self {
        if value { Self::True } else { Self::False }
    }
}

/// A condition as it is to be; its time and generation are added when it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) kind: &'static str,
    pub(super) status: Truth,
    /// In camel case.
    pub(super) reason: String,
    pub(super) message: String,
}

impl Condition {
    pub(super) fn new(kind: &'static str, status: impl Into<Truth>, reason: &str, message: &str) -> Self {
        let mut message = message.to_owned();
        if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
            message.truncate(end);
            message.push_str("...");
        }
        Self { kind, status: status.into(), reason: reason.to_owned(), message }
    }
}

/// The status that an object is to have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DesiredStatus {
    pub(super) conditions: Vec<Condition>,
    /// Its other fields.
    pub(super) fields: Map<String, Value>,
    /// Fields that keep their value if they aren't in `fields`.
    pub(super) retained: &'static [&'static str],
    /// Whether it will probably be another one soon: so it isn't written for a while.
    pub(super) is_provisional: bool,
}

/// The fields of a kind's status that are written with conditions.
pub(super) fn field_names(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::EgressPolicy | Kind::ClusterEgressPolicy => {
            &["addresses", "addressCount", "endpoints", "gateways", "gatewayCount"]
        }
        Kind::Gateway => &["vips", "sessions", "version"],
        // The record of addresses isn't written with these.
        Kind::AddressPool => &["capacity", "used", "services", "policies", "quarantined", "namespaces"],
        _ => &[],
    }
}

/// A change of a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Transition<'a> {
    pub(super) condition: &'a Condition,
    /// The status before; `None`: it is new.
    pub(super) before: Option<String>,
}

/// The condition of a type in a status.
pub(super) fn condition_of<'a>(status: &'a Value, kind: &str) -> Option<&'a Value> {
    status["conditions"].as_array()?.iter().find(|it| it["type"] == kind)
}

impl DesiredStatus {
    /// The status as it is written over `present`: a condition keeps its time while its status is the same.
    pub(super) fn document(&self, present: &Value, generation: i64, now: &str) -> Value {
        let conditions = self.conditions.iter().map(|condition| {
            let before = condition_of(present, condition.kind);
            let is_same = |it: &&Value| it["status"] == condition.status.as_str();
            let since = before.filter(is_same).and_then(|it| it["lastTransitionTime"].as_str()).unwrap_or(now);
            json!({
                "type": condition.kind,
                "status": condition.status.as_str(),
                "observedGeneration": generation,
                "lastTransitionTime": since,
                "reason": condition.reason,
                "message": condition.message,
            })
        });
        let mut document = self.fields.clone();
        for name in self.retained {
            if let Some(value) = present.get(*name).filter(|_| !document.contains_key(*name)) {
                document.insert((*name).to_owned(), value.clone());
            }
        }
        document.insert("conditions".to_owned(), conditions.collect());
        Value::Object(document)
    }

    /// The conditions whose status, reason or message is another one than in `present`.
    pub(super) fn transitions(&self, present: &Value) -> Vec<Transition<'_>> {
        let mut transitions = Vec::new();
        for condition in &self.conditions {
            let Condition { kind, status, reason, message } = condition;
            let before = condition_of(present, kind);
            let is_same = before.is_some_and(|it| {
                it["status"] == status.as_str() && it["reason"] == reason.as_str() && it["message"] == message.as_str()
            });
            if !is_same {
                let before = before.and_then(|it| it["status"].as_str()).map(str::to_owned);
                transitions.push(Transition { condition, before });
            }
        }
        transitions
    }
}

/// Whether a written status differs from the present one, in what is vipgate's: others may have added to it.
pub(super) fn differs(kind: Kind, document: &Value, present: &Value) -> bool {
    let of_fields = field_names(kind).iter().any(|name| document.get(*name) != present.get(*name));
    let mut conditions = document["conditions"].as_array().into_iter().flatten();
    let is_written = |it: &Value| {
        let before = it["type"].as_str().and_then(|kind| condition_of(present, kind));
        before == Some(it)
    };
    of_fields || !conditions.all(is_written)
}

#[cfg(test)]
mod tests;
