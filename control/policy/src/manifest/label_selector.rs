//! Label selectors with Kubernetes' semantics: all requirements must match; an empty selector matches everything.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use vipgate_dataplane::policy::limits::MAX_SELECTOR_TERMS;

use super::custom_resources::{ReportError, check_count};
use super::schema::requirement_alternatives;

/// Label with the namespace's name; Kubernetes sets it on every namespace.
pub(crate) const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Label selector; `{}` selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with these values.
    #[schemars(extend("maxProperties" = MAX_SELECTOR_TERMS))]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels.
    #[schemars(length(max = MAX_SELECTOR_TERMS), extend("default" = []))]
    pub match_expressions: Vec<Requirement>,
}

/// A requirement on the label `key`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(try_from = "RawRequirement")]
pub enum Requirement {
    /// The label has one of the values.
    In(String, Vec<String>),
    /// The label is missing or has none of the values.
    NotIn(String, Vec<String>),
    /// The label exists.
    Exists(String),
    /// The label is missing.
    DoesNotExist(String),
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("oneOf" = requirement_alternatives()))]
struct RawRequirement {
    /// The label.
    #[schemars(length(min = 1))]
    key: String,
    /// The operator.
    operator: Operator,
    /// Values of the label, for `In` and `NotIn`.
    #[serde(default)]
    #[schemars(length(max = MAX_SELECTOR_TERMS))]
    values: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
enum Operator {
    /// The label has one of the values.
    In,
    /// The label is missing or has none of the values.
    NotIn,
    /// The label exists.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

impl TryFrom<RawRequirement> for Requirement {
    type Error = &'static str;

    fn try_from(raw: RawRequirement) -> Result<Self, &'static str> {
        if raw.key.is_empty() {
            return Err("`key` must not be empty");
        }
        match (raw.operator, raw.values.is_empty()) {
            (Operator::In, false) => Ok(Self::In(raw.key, raw.values)),
            (Operator::NotIn, false) => Ok(Self::NotIn(raw.key, raw.values)),
            (Operator::In | Operator::NotIn, true) => Err("operator In or NotIn needs at least one of `values`"),
            (Operator::Exists, true) => Ok(Self::Exists(raw.key)),
            (Operator::DoesNotExist, true) => Ok(Self::DoesNotExist(raw.key)),
            (Operator::Exists | Operator::DoesNotExist, false) => {
                Err("operator Exists or DoesNotExist takes no `values`")
            }
        }
    }
}

impl LabelSelector {
    /// Reports lists that are too long; `field` is its own.
    pub(super) fn validate(&self, field: &str, report: &mut ReportError<'_>) {
        check_count(&format!("{field}.matchLabels"), self.match_labels.len(), MAX_SELECTOR_TERMS, report);
        check_count(&format!("{field}.matchExpressions"), self.match_expressions.len(), MAX_SELECTOR_TERMS, report);
        for (i, requirement) in self.match_expressions.iter().enumerate() {
            if let Requirement::In(_, values) | Requirement::NotIn(_, values) = requirement {
                check_count(&format!("{field}.matchExpressions[{i}].values"), values.len(), MAX_SELECTOR_TERMS, report);
            }
        }
    }

    /// Labels and values that it compares.
    pub(crate) fn terms(&self) -> usize {
        let values = |requirement: &Requirement| match requirement {
            Requirement::In(_, values) | Requirement::NotIn(_, values) => values.len(),
            Requirement::Exists(_) | Requirement::DoesNotExist(_) => 1,
        };
        self.match_labels.len() + self.match_expressions.iter().map(values).sum::<usize>()
    }

    /// Whether it may select another namespace than this one: it doesn't name it by its label.
    pub(crate) fn selects_more_than(&self, namespace: &str) -> bool {
        let is_own = |value: &String| *value == *namespace;
        let by_label = self.match_labels.get(NAMESPACE_NAME_LABEL).is_some_and(is_own);
        let by_requirement = |it: &Requirement| matches!(it, Requirement::In(key, values) if key == NAMESPACE_NAME_LABEL && values.iter().all(is_own));
        !by_label && !self.match_expressions.iter().any(by_requirement)
    }

    /// Whether an object with these labels is selected.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.matches(labels))
    }
}

impl Requirement {
    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        match self {
            Self::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Self::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
            Self::Exists(key) => labels.contains_key(key),
            Self::DoesNotExist(key) => !labels.contains_key(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reference model: each operator as a predicate on the list of labels.
    fn model(selector: &LabelSelector, labels: &[(String, String)]) -> bool {
        let has = |key: &String| labels.iter().filter(|(k, _)| k == key).count() > 0;
        let has_one_of =
            |key: &String, values: &[String]| values.iter().any(|v| labels.contains(&(key.clone(), v.clone())));
        let mut all = true;
        for (key, value) in &selector.match_labels {
            all = all && has_one_of(key, std::slice::from_ref(value));
        }
        for requirement in &selector.match_expressions {
            all = all
                && match requirement {
                    Requirement::In(key, values) => has_one_of(key, values),
                    Requirement::NotIn(key, values) => !has_one_of(key, values),
                    Requirement::Exists(key) => has(key),
                    Requirement::DoesNotExist(key) => !has(key),
                };
        }
        all
    }

    fn key() -> impl Strategy<Value = String> {
        "[a-c]"
    }

    fn requirement() -> impl Strategy<Value = Requirement> {
        let values = || prop::collection::vec("[x-z]", 1..3);
        prop_oneof![
            (key(), values()).prop_map(|(k, v)| Requirement::In(k, v)),
            (key(), values()).prop_map(|(k, v)| Requirement::NotIn(k, v)),
            key().prop_map(Requirement::Exists),
            key().prop_map(Requirement::DoesNotExist),
        ]
    }

    proptest! {
        #[test]
        fn a_selector_agrees_with_the_reference_model(
            match_labels in prop::collection::btree_map(key(), "[x-z]", 0..2),
            match_expressions in prop::collection::vec(requirement(), 0..3),
            labels in prop::collection::btree_map(key(), "[x-z]", 0..4),
        ) {
            let selector = LabelSelector { match_labels, match_expressions };
            let list: Vec<_> = labels.clone().into_iter().collect();
            prop_assert_eq!(selector.selects(&labels), model(&selector, &list));
        }
    }

    #[test]
    fn the_empty_selector_selects_everything() {
        assert!(LabelSelector::default().selects(&BTreeMap::new()));
        assert!(LabelSelector::default().selects(&[("a".into(), "b".into())].into()));
    }
}
