{{- define "evenkeel.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 40 characters leave room for suffixes of services and pods. The name of a release may contain
dots or begin with a digit, the name of a Service may not. */}}
{{- define "evenkeel.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := .Release.Name }}
{{- if not (contains $name $full) }}
{{- $full = printf "%s-%s" $full $name }}
{{- end }}
{{- if regexMatch "^[0-9]" $full }}
{{- $full = printf "ek-%s" $full }}
{{- end }}
{{- $full | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Merges a list of maps of labels or annotations into one with string values; the first map with a
key counts, and null takes a key away as in all values of Helm. */}}
{{- define "evenkeel.merged" -}}
{{- $all := dict }}
{{- range . }}
{{- range $key, $value := . }}
{{- if not (or (hasKey $all $key) (kindIs "invalid" $value)) }}
{{- $_ := set $all $key (kindIs "string" $value | ternary $value (toJson $value)) }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{/* Quoted, because a release may be called 123, and Kubernetes refuses numbers as labels. */}}
{{- define "evenkeel.selectorLabels" -}}
app.kubernetes.io/name: {{ include "evenkeel.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "evenkeel.commonLabels" -}}
{{- $chart := printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- $own := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/managed-by" .Release.Service "helm.sh/chart" $chart }}
{{- include "evenkeel.merged" (list .Values.commonLabels $own) }}
{{- end }}

{{- define "evenkeel.labels" -}}
{{- include "evenkeel.merged" (list (include "evenkeel.selectorLabels" . | fromYaml) (include "evenkeel.commonLabels" . | fromYaml)) }}
{{- end }}

{{/* Labels of the controllers' pods. Users cannot change the labels that selectors need. */}}
{{- define "evenkeel.podLabels" -}}
{{- include "evenkeel.merged" (list (include "evenkeel.selectorLabels" . | fromYaml) .Values.podLabels (include "evenkeel.commonLabels" . | fromYaml)) }}
{{- end }}

{{/* Other pods have another name, so that the controllers' selectors do not match them. */}}
{{- define "evenkeel.valkeySelectorLabels" -}}
app.kubernetes.io/name: {{ include "evenkeel.name" . | trunc 56 | trimSuffix "-" }}-valkey
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "evenkeel.valkeyLabels" -}}
{{- include "evenkeel.merged" (list (include "evenkeel.valkeySelectorLabels" . | fromYaml) (include "evenkeel.commonLabels" . | fromYaml)) }}
{{- end }}

{{- define "evenkeel.testSelectorLabels" -}}
app.kubernetes.io/name: {{ include "evenkeel.name" . | trunc 56 | trimSuffix "-" }}-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "evenkeel.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "evenkeel.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "evenkeel.image" -}}
{{- $repository := .Values.image.repository }}
{{- if .Values.image.registry }}
{{- $repository = printf "%s/%s" .Values.image.registry $repository }}
{{- end }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" $repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* Not empty if the store is outside the controllers. */}}
{{- define "evenkeel.externalStore" -}}
{{- if or .Values.redis.url .Values.redis.urlKey .Values.devValkey.enabled }}true{{ end }}
{{- end }}

{{/* The ports where Redis may listen, as a JSON array: those of the values and of the URL's hosts. */}}
{{- define "evenkeel.redisPorts" -}}
{{- $named := regexFindAll ":[0-9]+([,/]|$)" (splitList "?" .Values.redis.url | first) -1 }}
{{- regexFindAll "[0-9]+" (concat .Values.networkPolicy.redisPorts $named | join " ") -1 | uniq | toJson }}
{{- end }}

{{/* Not empty if nobody may connect without a certificate or a token. */}}
{{- define "evenkeel.strict" -}}
{{- if eq .Values.security "strict" }}true{{ end }}
{{- end }}

{{- define "evenkeel.networkPolicy" -}}
{{- if or .Values.networkPolicy.enabled (include "evenkeel.strict" .) }}true{{ end }}
{{- end }}

{{- define "evenkeel.restScheme" -}}
{{- if .Values.rest.tls.existingSecret }}https{{ else }}http{{ end }}
{{- end }}

{{/* Where the runbook pages are: the given URL, or the controllers, which serve them. */}}
{{- define "evenkeel.runbookUrl" -}}
{{- $rule := .Values.prometheusRule }}
{{- if $rule.runbookBaseUrl }}
{{- $rule.runbookBaseUrl }}
{{- else if and .Values.ingress.enabled .Values.ingress.hosts }}
{{- printf "%s://%s/runbooks" (ternary "https" "http" (not (empty .Values.ingress.tls))) (first .Values.ingress.hosts) }}
{{- else if and .Values.httpRoute.enabled .Values.httpRoute.hostnames }}
{{- printf "https://%s/runbooks" (first .Values.httpRoute.hostnames) }}
{{- else }}
{{- printf "%s://%s.%s.svc:%v/runbooks" (include "evenkeel.restScheme" .) (include "evenkeel.fullname" .) .Release.Namespace .Values.service.restPort }}
{{- end }}
{{- end }}

{{/* Not empty if a part is created, by its `enabled`: auto is yes in the profiles that plan, if the
     cluster has the API that it needs. Arguments: the root, the part's values, that API or "". */}}
{{- define "evenkeel.enabled" -}}
{{- $root := index . 0 }}
{{- $enabled := (index . 1).enabled }}
{{- $api := index . 2 }}
{{- if eq (toString $enabled) "auto" }}
{{- if and (ne $root.Values.profile "observe") (or (not $api) ($root.Capabilities.APIVersions.Has $api)) }}true{{ end }}
{{- else if $enabled }}true{{ end }}
{{- end }}

{{- define "evenkeel.serviceMonitor" -}}
{{- include "evenkeel.enabled" (list . .Values.serviceMonitor "monitoring.coreos.com/v1/ServiceMonitor") }}
{{- end }}

{{- define "evenkeel.prometheusRule" -}}
{{- include "evenkeel.enabled" (list . .Values.prometheusRule "monitoring.coreos.com/v1/PrometheusRule") }}
{{- end }}

{{/* The controllers' settings. Health follows the thresholds of the alerts, and no bound may be 0. */}}
{{- define "evenkeel.settings" -}}
{{- $alerts := .Values.prometheusRule.thresholds }}
{{- $units := dict "ms" 0.001 "s" 1 "m" 60 "h" 3600 "d" 86400 "w" 604800 "y" 31536000 }}
{{- $mismatch := 0.0 }}
{{- range regexFindAll "[0-9]+[a-z]+" $alerts.epochMismatchFor -1 }}
{{- $mismatch = addf $mismatch (mulf (regexFind "[0-9]+" .) (get $units (regexFind "[a-z]+" .))) }}
{{- end }}
{{- $health := dict "balancedness_min" $alerts.balancednessMin
                    "time_balance_min" $alerts.timeBalanceMin
                    "data_stale_s" $alerts.dataStaleSeconds
                    "slow_rank_ratio" $alerts.slowRankRatio
                    "plan_stuck_s" $alerts.planStuckSeconds
                    "plan_failed_s" $alerts.planFailedSeconds
                    "plans_lost_time" $alerts.plansLostTime
                    "no_decision_s" $alerts.noDecisionsSeconds
                    "epoch_mismatch_s" (maxf 0.001 $mismatch) }}
{{ toYaml (mergeOverwrite (dict "profile" .Values.profile "health" $health) (deepCopy .Values.config)) }}
{{- end }}

{{- define "evenkeel.validate" -}}
{{- range .Values.extraEnv }}
{{- if regexMatch "(?i)^EVENKEEL_(PROFILE|PLANNER__MODE)$" .name }}
{{- fail (printf "extraEnv sets %s, which would override the value profile %s: set that one alone" .name $.Values.profile) }}
{{- end }}
{{- end }}
{{- if and (gt (int .Values.replicaCount) 1) (not (include "evenkeel.externalStore" .)) }}
{{- fail "replicaCount above 1 needs an external store: set redis.url or redis.urlKey, or devValkey.enabled for a trial" }}
{{- end }}
{{- if and (gt (int .Values.replicaCount) 1) (not .Values.api.tokens.existingSecret) }}
{{- fail "replicaCount above 1 needs api.tokens.existingSecret: each replica would make a token of its own" }}
{{- end }}
{{- if and (gt (int .Values.replicaCount) 1) .Values.persistence.enabled }}
{{- fail "persistence is for the embedded store of one replica; with replicaCount above 1 the state is in Redis" }}
{{- end }}
{{- if regexMatch "://[^/@]*:[^/]*@" .Values.redis.url }}
{{- fail "redis.url holds a password: put it in a secret and name it with redis.existingSecret and redis.passwordKey" }}
{{- end }}
{{- if and .Values.redis.url .Values.redis.urlKey }}
{{- fail "redis.url and redis.urlKey both name the store: set one" }}
{{- end }}
{{- if and .Values.devValkey.enabled (or .Values.redis.url .Values.redis.urlKey) }}
{{- fail "devValkey.enabled and redis name two stores: set one" }}
{{- end }}
{{- with .Values.persistence }}
{{- if and .existingClaim (not .enabled) }}
{{- fail (printf "persistence.existingClaim %s needs persistence.enabled: the data would be lost with the pod" .existingClaim) }}
{{- end }}
{{- end }}
{{- if include "evenkeel.strict" . }}
{{- $missing := list }}
{{- if not .Values.grpc.tls.existingSecret }}
{{- $missing = append $missing "grpc.tls.existingSecret (ranks must use TLS)" }}
{{- end }}
{{- if not .Values.grpc.tls.clientCaKey }}
{{- $missing = append $missing "grpc.tls.clientCaKey (ranks must show certificates)" }}
{{- end }}
{{- if not .Values.rest.tls.existingSecret }}
{{- $missing = append $missing "rest.tls.existingSecret (tokens must not be sent in clear text)" }}
{{- end }}
{{- if not .Values.api.tokens.existingSecret }}
{{- $missing = append $missing "api.tokens.existingSecret (the first token has role admin and names no person)" }}
{{- end }}
{{- with $missing }}
{{- fail (printf "security: strict needs %s" (join ", " .)) }}
{{- end }}
{{- if .Values.devValkey.enabled }}
{{- fail "security: strict refuses devValkey.enabled: the trial store has no password" }}
{{- end }}
{{- end }}
{{- with .Values.grpc.tls }}
{{- if and .clientCaKey (not .existingSecret) }}
{{- fail (printf "grpc.tls.clientCaKey %s names a key of grpc.tls.existingSecret, which is empty: ranks would connect without TLS" .clientCaKey) }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress.enabled needs ingress.hosts" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs" }}
{{- end }}
{{- with .Values.redis }}
{{- $keys := or .urlKey .usernameKey .passwordKey .sentinel.usernameKey .sentinel.passwordKey }}
{{- if and $keys (not .existingSecret) }}
{{- fail "redis.urlKey, usernameKey, passwordKey and those of redis.sentinel name keys of redis.existingSecret, which is empty" }}
{{- end }}
{{- if and .existingSecret (not $keys) }}
{{- fail "redis.existingSecret is set and none of redis.urlKey, usernameKey, passwordKey and redis.sentinel names a key of it" }}
{{- end }}
{{- if and .existingSecret (not (or .url .urlKey)) }}
{{- fail (printf "redis.existingSecret %s has credentials of a store that neither redis.url nor redis.urlKey names" .existingSecret) }}
{{- end }}
{{- if ne (empty .usernameKey) (not (contains "$(REDIS_USERNAME)" .url)) }}
{{- fail (printf "redis.usernameKey and $(REDIS_USERNAME) in redis.url need each other: the key is %q, the URL %q" .usernameKey .url) }}
{{- end }}
{{- range list (list "tls" "redis-tls" .tls) (list "sentinel.tls" "sentinel-tls" .sentinel.tls) }}
{{- $mount := printf "/etc/evenkeel/%s/" (index . 1) }}
{{- $secret := (index . 2).existingSecret }}
{{- if and $secret (not $.Values.redis.urlKey) (not (contains $mount $.Values.redis.url)) }}
{{- fail (printf "redis.%s.existingSecret %s is mounted at %s, and redis.url %q names no file there: it would not be used" (index . 0) $secret $mount $.Values.redis.url) }}
{{- end }}
{{- end }}
{{- if and (or .sentinel.usernameKey .sentinel.passwordKey) .url (not (contains "+sentinel://" .url)) }}
{{- fail "redis.sentinel is for a redis.url that begins with redis+sentinel:// or rediss+sentinel://" }}
{{- end }}
{{- if regexMatch "password=" .url }}
{{- fail "redis.url holds a password: put it in redis.existingSecret and name its key with passwordKey" }}
{{- end }}
{{- end }}
{{- end }}
