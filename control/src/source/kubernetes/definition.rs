//! Definitions of vipgate's kinds (CustomResourceDefinitions): whether objects were deleted one by one, or with their
//! definition.
//!
//! The API server deletes all objects of a definition that is deleted, and a watch can't distinguish them from objects
//! that somebody has deleted.

use std::sync::Arc;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PartialObjectMeta;
use kube::{Api, Client, Error};
use vipgate_policy::manifest::Kind;

/// A definition as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Definition {
    /// It exists; its uid.
    Served(Arc<str>),
    /// It doesn't exist, or is being deleted.
    Removed,
    /// It isn't known: the account may not read definitions, or the kind is one of Kubernetes' own.
    Unknown,
}

/// Reads the definition of a kind.
///
/// # Errors
/// If the API server doesn't respond as it should.
pub(super) async fn read(client: &Client, kind: Kind) -> Result<Definition, Error> {
    let Some((group, _)) = kind.api_version().split_once('/').filter(|_| kind.is_custom()) else {
        return Ok(Definition::Unknown);
    };
    let definitions: Api<PartialObjectMeta<CustomResourceDefinition>> = Api::all(client.clone());
    match definitions.get_opt(&format!("{}.{group}", kind.plural())).await {
        Ok(None) => Ok(Definition::Removed),
        Ok(Some(it)) if it.metadata.deletion_timestamp.is_some() => Ok(Definition::Removed),
        Ok(Some(it)) => Ok(it.metadata.uid.map_or(Definition::Unknown, |uid| Definition::Served(uid.into()))),
        Err(Error::Api(status)) if status.code == 403 => Ok(Definition::Unknown),
        Err(error) => Err(error),
    }
}
