//! The metadata server's token: of the service account of the instance, or of the Kubernetes ServiceAccount (GKE).
//! <https://cloud.google.com/compute/docs/access/authenticate-workloads>

use bytes::Bytes;
use hyper::Request;

use super::{ISSUER, SCOPE, Token};
use crate::credential::form;
use crate::error::CloudError;
use crate::http::HttpClient;

pub(super) async fn token(http: &HttpClient, host: &str) -> Result<Token, CloudError> {
    let query = form(&[("scopes", SCOPE)]);
    let url = format!("http://{host}/computeMetadata/v1/instance/service-accounts/default/token?{query}");
    // The header keeps requests from being forged by pages and proxies.
    let request = Request::builder().uri(url).header("Metadata-Flavor", "Google").body(Bytes::new());
    let request = request.map_err(|_| ISSUER.refused("Host", "the metadata server's host is malformed"))?;
    ISSUER.fetch(http, request).await
}
