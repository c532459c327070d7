-- int_exclusions: training rows of a kind that no verifier can grade with trust, with the words that say so.
-- Kimi k1.5 drops multiple choice, true/false and proofs, since they verify wrong reasoning; Qwen3 drops
-- questions of several parts and those without a checkable answer. How well the rules do on labelled
-- problems: datasets/exclusions_labelled.jsonl, held by tests/sql/test_exclusions.py.
-- Grain: one row per good training row that a rule met; of several rules the first counts.
--   pool_order, row_number   as in stg_problems
--   rule                     varchar  `multiple choice`, `true or false`, `proof`, `multi-part`, `no checkable answer`
--   evidence                 varchar  what the rule found in the question or in the answer
with found as (
    select
        pool_order,
        row_number,
        nullif(coalesce(
            nullif(regexp_extract(question, '(?s)(?:^|[\s{])\(?A\s?[).:]}?\s*\S.*?[\s{]\(?B\s?[).:]}?\s*\S.*?[\s{]\(?C\s?[).:]'), ''),
            nullif(regexp_extract(
                question,
                '(?i)\b(?:which (?:one )?of (?:the following|these)|(?:choose|select|pick|mark|circle) (?:the |all )?(?:correct|best|right|following|that apply|one of)|answer choices?:|options?:)'
            ), ''),
            if(regexp_full_match(answer, '\(?[A-E]\)?\.?'), nullif(regexp_extract(question, '(?s)\(?A[).:]\s*\S.*?\(?B[).:]'), ''), null)
        ), '') as "multiple choice",
        nullif(coalesce(
            nullif(regexp_extract(question, '(?i)\b(?:true or false|true/false|yes or no|yes/no|right or wrong|correct or incorrect)\b'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:true|false|yes|no|correct|incorrect)\b[.!]?$'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:yes|no)[,.;:] .*'), '')
        ), '') as "true or false",
        nullif(coalesce(
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?,$)]\s+|\n\s*|\band (?:then |hence )?|\bthen |\bto |\bplease |\d[.)] )(?:dis)?prove\b[^.?!]{0,60}'), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?,$)]\s+|\n\s*|\band |\bthen |\bplease )(?:show|verify|demonstrate|deduce|establish|justify|conclude)\s+(?:that|why|the (?:identity|inequality|equality|claim|statement)|algebraically)\b[^.?!]{0,60}'), ''),
            nullif(regexp_extract(question, '(?i)\b(?:give|write|provide|find|construct|complete) (?:a|an|the|your)(?: \w+){0,2} proof\b'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:proof\b|q\.?e\.?d\b|(?:it is )?proven\b|we (?:prove|show)\b).{0,60}'), '')
        ), '') as "proof",
        nullif(coalesce(
            nullif(regexp_extract(question, '(?s)(?:^|\s)\(?a[).]\s.*?\s\(?b[).]\s'), ''),
            nullif(regexp_extract(question, '(?s)\(i\).*?\(ii\)'), ''),
            nullif(regexp_extract(question, '(?is)\bpart \(?(?:a|i|1|one)\b.*?\bpart \(?(?:b|ii|2|two)\b'), ''),
            nullif(regexp_extract(question, '(?s)(?:^|\s)1[.)]\s+[A-Z].*?\s2[.)]\s+[A-Z]'), ''),
            nullif(regexp_extract(question, '(?i)\?\s+(?:and |also,? |if so,? |in addition,? )?(?:what|how|who|which|when|where|is|are|does|do|can|find|compute|calculate|determine)\b.*[?.]\s*$'), ''),
            nullif(regexp_extract(question, '(?i)[.?]\s+(?:also,? |in addition,? |moreover,? |additionally,? )(?:find|compute|calculate|determine|state|give|what|how)\b.*'), ''),
            nullif(regexp_extract(answer, '(?s)^\(?(?:a|i|1)\).*\(?(?:b|ii|2)\)'), '')
        ), '') as "multi-part",
        nullif(coalesce(
            nullif(regexp_extract(
                question,
                '(?i)(?:^|[.;:!?$]\s+|\n\s*|\band )(?:explain|describe|discuss|outline|summari[sz]e|compare and contrast|interpret|comment on|critique) (?:how|why|what|the|in|a|an|its|each|two|three|whether|on)\b[^.?!]{0,60}'
            ), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*)(?:sketch|draw|plot|graph|construct|design|invent|make up) (?:the|a|an|and|two|your)\b[^.?!]{0,60}'), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*)write (?:a|an|your|the) (?:\w+ ){0,2}(?:story|essay|poem|paragraph|word problem|problem|report|summary|question|program)\b'), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*)(?:give|find|provide|state|list) (?:an|some|two|three|any) (?:\w+ )?(?:examples?|counterexamples?)\b'), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*|, )(?:why (?:is|are|does|do|did|was|were|can|must|should)|what do you (?:think|notice)|in your own words)\b[^.?!]{0,60}'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:.*\b)?(?:answers? (?:may|will|can) vary|see (?:the )?(?:solution|figure|explanation|above|graph|diagram|text|proof)|left (?:to|as) .{0,20}(?:reader|exercise)|omitted)\b.*'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:n/?a|none|null|unknown|nan|tbd|\W*)$'), ''),
            nullif(regexp_extract(answer, '^(?:[^\s]+\s+){19}[^\s].*'), '')
        ), '') as "no checkable answer"
    from stg_problems
    where benchmark is null
),

hits as (
    unpivot found
    on "multiple choice", "true or false", "proof", "multi-part", "no checkable answer"
    into name rule value evidence
),

final as (
    select hits.pool_order, hits.row_number, hits.rule, substr(hits.evidence, 1, 200) as evidence
    from hits
    inner join excluded_kinds using (rule)
    qualify row_number() over (partition by hits.pool_order, hits.row_number order by excluded_kinds.place) = 1
)

select * from final
