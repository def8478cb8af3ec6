//! Credentials, from the first of these that there is: environment, web identity (IRSA), container credentials (EKS Pod Identity, ECS),
//! the instance's role (IMDSv2).

mod reply;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hyper::header::{ACCEPT, AUTHORIZATION};
use hyper::{Method, Request};
use tokio::sync::Mutex;

use self::reply::{AssumeRole, SecurityCredentials};
use crate::error::{CloudError, ErrorKind};
use crate::http::HttpClient;

/// Timeout of requests to metadata servers, which are one hop away or nowhere.
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// Keys are renewed this long before they end.
const RENEWAL_TIME: Duration = Duration::from_mins(5);
/// Lifetime of an IMDSv2 token, seconds.
const TOKEN_SECONDS: &str = "300";
/// Name of the operation in errors.
const OPERATION: &str = "GetCredentials";

/// Keys that sign requests.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) access_key: String,
    pub(super) secret_key: String,
    pub(super) session_token: Option<String>,
    expires: Option<SystemTime>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// Where keys come from.
#[derive(Clone)]
pub enum CredentialSource {
    /// Fixed keys.
    Keys {
        /// Access key id.
        access_key: String,
        /// Secret access key.
        secret_key: String,
        /// Session token, of temporary keys.
        session_token: Option<String>,
    },
    /// A role for a token in a file (AssumeRoleWithWebIdentity).
    WebIdentity {
        /// The token's file, read each time.
        token_file: PathBuf,
        /// The role's ARN.
        role: String,
        /// URL of STS.
        sts: String,
    },
    /// An agent on the host, as EKS Pod Identity and ECS have it.
    Container {
        /// Its URL.
        url: String,
        /// File with its authorization token.
        token_file: Option<PathBuf>,
    },
    /// The role of the instance.
    Instance {
        /// URL of the metadata server.
        imds: String,
    },
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl CredentialSource {
    /// The source that the environment names; without one, the instance's role.
    pub fn from_environment(region: &str, variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        if let (Some(access_key), Some(secret_key)) = (set("AWS_ACCESS_KEY_ID"), set("AWS_SECRET_ACCESS_KEY")) {
            return Self::Keys { access_key, secret_key, session_token: set("AWS_SESSION_TOKEN") };
        }
        if let (Some(token_file), Some(role)) = (set("AWS_WEB_IDENTITY_TOKEN_FILE"), set("AWS_ROLE_ARN")) {
            let sts = set("AWS_ENDPOINT_URL_STS").unwrap_or_else(|| format!("https://sts.{region}.amazonaws.com"));
            return Self::WebIdentity { token_file: token_file.into(), role, sts };
        }
        if let Some(url) = set("AWS_CONTAINER_CREDENTIALS_FULL_URI") {
            let token_file = set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(PathBuf::from);
            return Self::Container { url, token_file };
        }
        let imds = set("AWS_EC2_METADATA_SERVICE_ENDPOINT").unwrap_or_else(|| "http://169.254.169.254".to_owned());
        Self::Instance { imds }
    }

    /// Its name in logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Keys { .. } => "environment",
            Self::WebIdentity { .. } => "web identity",
            Self::Container { .. } => "container credentials",
            Self::Instance { .. } => "instance metadata",
        }
    }
}

/// Credentials, kept until they end.
pub(super) struct Credentials {
    source: CredentialSource,
    http: HttpClient,
    metadata: HttpClient,
    keys: Mutex<Option<Arc<Keys>>>,
}

impl Credentials {
    pub(super) fn new(source: CredentialSource) -> Self {
        let metadata = HttpClient::with_timeout(METADATA_TIMEOUT);
        Self { source, http: HttpClient::new(), metadata, keys: Mutex::default() }
    }

    /// The keys; new ones if those that are kept end soon, or were refused.
    pub(super) async fn keys(&self, is_refused: bool) -> Result<Arc<Keys>, CloudError> {
        // One request at a time: others wait for its keys.
        let mut kept = self.keys.lock().await;
        let is_valid = |keys: &Arc<Keys>| keys.expires.is_none_or(|end| end > SystemTime::now() + RENEWAL_TIME);
        if let Some(keys) = kept.as_ref().filter(|keys| is_valid(keys) && !is_refused) {
            return Ok(keys.clone());
        }
        match self.fetch().await {
            Ok(keys) => Ok(kept.insert(Arc::new(keys)).clone()),
            // Keys that haven't ended yet may still be good.
            Err(error) => {
                let is_usable = |keys: &&Arc<Keys>| keys.expires.is_none_or(|end| end > SystemTime::now());
                kept.as_ref().filter(is_usable).filter(|_| !is_refused).cloned().ok_or(error)
            }
        }
    }

    async fn fetch(&self) -> Result<Keys, CloudError> {
        match &self.source {
            CredentialSource::Keys { access_key, secret_key, session_token } => Ok(Keys {
                access_key: access_key.clone(),
                secret_key: secret_key.clone(),
                session_token: session_token.clone(),
                expires: None,
            }),
            CredentialSource::WebIdentity { token_file, role, sts } => {
                let token = read_token(token_file).await?;
                let form = form_urlencoded::Serializer::new(String::new())
                    .append_pair("Action", "AssumeRoleWithWebIdentity")
                    .append_pair("Version", "2011-06-15")
                    .append_pair("RoleArn", role)
                    .append_pair("RoleSessionName", "vipgate")
                    .append_pair("WebIdentityToken", &token)
                    .finish();
                let request = Request::post(sts.as_str())
                    .header(hyper::header::CONTENT_TYPE, "application/x-www-form-urlencoded; charset=utf-8")
                    .body(Bytes::from(form));
                let reply = get(&self.http, request).await?;
                AssumeRole::read(&reply).and_then(AssumeRole::keys)
            }
            CredentialSource::Container { url, token_file } => {
                let mut request = Request::get(url.as_str());
                if let Some(file) = token_file {
                    request = request.header(AUTHORIZATION, read_token(file).await?);
                }
                let reply = get(&self.metadata, request.body(Bytes::new())).await?;
                SecurityCredentials::read(&reply).and_then(SecurityCredentials::keys)
            }
            CredentialSource::Instance { imds } => self.of_instance(imds).await,
        }
    }

    async fn of_instance(&self, imds: &str) -> Result<Keys, CloudError> {
        let token = Request::builder()
            .method(Method::PUT)
            .uri(format!("{imds}/latest/api/token"))
            .header("x-aws-ec2-metadata-token-ttl-seconds", TOKEN_SECONDS)
            .body(Bytes::new());
        let token = text(&get(&self.metadata, token).await?);
        let metadata = async |path: &str| {
            let request = Request::get(format!("{imds}/latest/meta-data/iam/security-credentials/{path}"))
                .header("x-aws-ec2-metadata-token", &token)
                .header(ACCEPT, "*/*")
                .body(Bytes::new());
            get(&self.metadata, request).await
        };
        let roles = text(&metadata("").await?);
        let role = roles.lines().next().filter(|role| !role.is_empty());
        let role = role.ok_or_else(|| error("NoRole", "the instance has no role"))?;
        SecurityCredentials::read(&metadata(role).await?).and_then(SecurityCredentials::keys)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

fn error(code: &str, message: &str) -> CloudError {
    CloudError::new(ErrorKind::Credentials, OPERATION, code, message)
}

async fn read_token(file: &PathBuf) -> Result<String, CloudError> {
    let token = tokio::fs::read_to_string(file).await;
    let token = token.map_err(|cause| error("TokenFile", &format!("{}: {cause}", file.display())))?;
    Ok(token.trim().to_owned())
}

/// The body of a successful response. Errors have nothing of the request or the response in them but the status.
async fn get(http: &HttpClient, request: Result<Request<Bytes>, hyper::http::Error>) -> Result<Bytes, CloudError> {
    let request = request.map_err(|cause| error("Request", &cause.to_string()))?;
    let host = request.uri().host().unwrap_or_default().to_owned();
    let response = http.send(request).await.map_err(|cause| error("NotReachable", &format!("{host}: {cause}")))?;
    if response.status().is_success() {
        return Ok(response.into_body());
    }
    let code = super::reply::error_of(response.body()).map(|(code, _)| code);
    let code = code.unwrap_or_else(|| response.status().as_u16().to_string());
    Err(error(&code, &format!("{host} refuses credentials with status {}", response.status().as_u16())))
}
